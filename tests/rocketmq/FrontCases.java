import static java.nio.charset.StandardCharsets.UTF_8;

import java.time.Duration;
import java.util.ArrayList;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeSet;
import java.util.concurrent.CountDownLatch;
import org.apache.rocketmq.client.apis.ClientConfiguration;
import org.apache.rocketmq.client.apis.ClientException;
import org.apache.rocketmq.client.apis.ClientServiceProvider;
import org.apache.rocketmq.client.apis.consumer.ConsumeResult;
import org.apache.rocketmq.client.apis.consumer.FilterExpression;
import org.apache.rocketmq.client.apis.message.Message;
import org.apache.rocketmq.client.apis.message.MessageView;
import org.apache.rocketmq.client.apis.producer.Producer;
import org.apache.rocketmq.client.apis.producer.TransactionResolution;

/** Uses a front with the official Java client, after the program of the page; each line of the output is a fact. */
public class FrontCases {
    static final ClientServiceProvider CLIENT = Shop.CLIENT;
    static final Duration MINUTE = Duration.ofMinutes(1);
    static ClientConfiguration configuration;

    public static void main(String[] arguments) throws Exception {
        Shop.main(arguments);
        configuration = ClientConfiguration.newBuilder().setEndpoints(arguments[0]).enableSsl(false).build();
        Set<String> asked = new HashSet<>();
        try (var producer = CLIENT.newProducerBuilder()
                .setClientConfiguration(configuration)
                .setTopics("steps", "later", "paid")
                .setTransactionChecker(message -> answer(message, asked))
                .build()) {
            send(producer);
            end(producer);
            receive();
        }
        push();
        System.exit(0);
    }

    /** Returns the answer to a question about a transaction, by its body: UNKNOWN at first. */
    static TransactionResolution answer(MessageView message, Set<String> asked) {
        if (asked.add(body(message))) {
            return TransactionResolution.UNKNOWN;
        }
        return body(message).equals("forgotten") ? TransactionResolution.COMMIT : TransactionResolution.ROLLBACK;
    }

    static void send(Producer producer) throws Exception {
        for (var body : List.of("first", "second")) {
            var receipt = producer.send(CLIENT.newMessageBuilder()
                    .setTopic("steps").setBody(body.getBytes(UTF_8)).setMessageGroup("group").setTag("tag")
                    .setKeys("key-1", "key-2").addProperty("name", "value").build());
            say("sent", body, receipt.getMessageId().getVersion());
        }
        try {
            producer.send(CLIENT.newMessageBuilder()
                    .setTopic("later").setBody(new byte[1])
                    .setDeliveryTimestamp(System.currentTimeMillis() + Duration.ofHours(25).toMillis()).build());
        } catch (ClientException refused) {
            say("refused", refused.getMessage().replaceAll("request-id=[^,]*, ", ""));
        }
    }

    static void end(Producer producer) throws Exception {
        for (var body : List.of("committed", "rolled back", "forgotten", "undone")) {
            var transaction = producer.beginTransaction();
            producer.send(CLIENT.newMessageBuilder().setTopic("paid").setBody(body.getBytes(UTF_8)).build(), transaction);
            if (body.equals("committed")) {
                transaction.commit();
            } else if (body.equals("rolled back")) {
                transaction.rollback();
            }
        }
    }

    /** Receives with a simple consumer until the answer of the checker has been delivered, too. */
    static void receive() throws Exception {
        try (var consumer = CLIENT.newSimpleConsumerBuilder()
                .setClientConfiguration(configuration)
                .setConsumerGroup("accounts")
                .setAwaitDuration(Duration.ofSeconds(5))
                .setSubscriptionExpressions(Map.of("paid", FilterExpression.SUB_ALL))
                .build()) {
            List<MessageView> all = new ArrayList<>();
            while (all.stream().noneMatch(each -> body(each).equals("forgotten"))) {
                all.addAll(consumer.receive(32, MINUTE));
            }
            for (var message : all) {
                consumer.ack(message);
                say("received", body(message), message.getProperties().getOrDefault("TRANSACTION_CHECK_TIMES", "not asked"));
            }
        }
    }

    /** Receives with a push consumer, which fails once. */
    static void push() throws Exception {
        var all = new CountDownLatch(3);
        try (var consumer = CLIENT.newPushConsumerBuilder()
                .setClientConfiguration(configuration)
                .setConsumerGroup("billing")
                .setSubscriptionExpressions(Map.of("steps", FilterExpression.SUB_ALL))
                .setMessageListener(message -> {
                    say("pushed", body(message), message.getDeliveryAttempt(), message.getTag().get(),
                            new TreeSet<>(message.getKeys()), message.getMessageGroup().get(),
                            message.getProperties().get("name"));
                    all.countDown();
                    boolean fails = body(message).equals("second") && message.getDeliveryAttempt() == 1;
                    return fails ? ConsumeResult.FAILURE : ConsumeResult.SUCCESS;
                })
                .build()) {
            all.await();
        }
    }

    static String body(MessageView message) {
        return UTF_8.decode(message.getBody()).toString();
    }

    static synchronized void say(Object... facts) {
        System.out.println(List.of(facts));
    }
}
